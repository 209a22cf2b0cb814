"""Peers in programs: in a thread, under asyncio, and as a program of its own that ends on signals."""
