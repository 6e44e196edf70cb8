"""Planning: what calls will move, and how long they will take.

counts.py      rows from rank to rank, to node and to expert, of a routing
sent.py        the bytes that a call sends for them, kind by kind
"""
