"""Everything that touches a private name of another library, with the reason and when it can go."""
