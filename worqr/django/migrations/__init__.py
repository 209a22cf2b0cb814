"""The migrations of the application ``worqr``."""
