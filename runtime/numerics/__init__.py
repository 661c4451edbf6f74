"""Arithmetic whose bits do not depend on what runs beside it.

arrange.py    the ways a matrix product can be laid out so that a row's bits are its own
probe.py      finds, for the shapes of a model on this machine, the cheapest way that really is exact
linear.py     linear layers that use the arrangement found, and the head that computes only the rows wanted
few.py        products of few rows on a CPU, in pieces on all cores
blocks.py     the standard blocks in few operations, and by NumPy in rounds of few rows
exponential.py  e to the power of x by NumPy on a CPU, in MLX's memory
rope.py       rotary embeddings from a table
"""
