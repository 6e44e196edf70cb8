"""`anyep tune`: which tile sizes and how many SMs are best on this machine."""
