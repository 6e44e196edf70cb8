"""Planning: what calls will move, and how long they will take.

counts.py        rows from rank to rank, to node and to expert, of a routing
sent.py          the bytes that a call sends for them, kind by kind
expectation.py   the same rows on average, where no routing is given
machines.py      the constants of machines, `anyep/machines/*.toml`
times.py         how long a call takes on one of them
validation.py    published times beside these
"""
