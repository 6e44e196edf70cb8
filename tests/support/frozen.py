"""Imported last by the server that ranks are forked from: what is loaded there stays as long as the ranks.

Their garbage collectors need not look at it, and need not copy the memory that it is in.
"""

import gc

gc.collect()
gc.freeze()
