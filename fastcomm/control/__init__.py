"""How the ranks agree on what they do together: what each announces, and what all conclude."""
