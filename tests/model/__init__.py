"""An explicit-state model of the normal-mode protocol on one node, and the explorer that checks it."""
