"""How the small model that ships with this package, and its drafts, are trained."""
