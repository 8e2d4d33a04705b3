"""Pure arrays: fragments, codecs, the merge and the outer optimizer.

Nothing here reads a clock, draws a random number or touches a file: the same
arrays in give the same bits out, on any mesh of one backend.
"""
