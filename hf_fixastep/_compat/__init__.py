"""Everything that touches a private name of another library; each entry says which version needs it and why."""
