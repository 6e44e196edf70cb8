"""The control plane: call numbers, notify messages, waits with deadlines, liveness and failure reports."""
