"""The protocol as small exhaustive models; `search` is the engine, each other module one model."""
