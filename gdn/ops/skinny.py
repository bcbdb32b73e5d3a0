"""Products with few rows: on a CPU the order of the operands decides their speed."""

# Up to this many rows a product is bound by reading its large operand. XLA's CPU backend streams a
# left operand whose contracted axis is the last and repacks a right one: y^T = W x^T takes 1.4
# times as long for 8 rows as for one, y = x W^T more than 3 times.
SKINNY_ROWS = 32
