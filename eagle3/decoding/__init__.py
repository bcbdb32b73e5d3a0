"""Decoding loops on the device."""
