"""What `decode.py` does: one module per mode, over `eagle3.decoding` and `eagle3.text`."""
