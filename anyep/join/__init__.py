"""How the ranks of a Buffer find each other, who is lost meanwhile, and what must be equal on all of them."""
