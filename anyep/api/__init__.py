"""The public classes: they check arguments, call a session, and return the documented tuples."""
