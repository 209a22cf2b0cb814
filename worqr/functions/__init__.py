"""Typed functions and schedules: how an application declares them, and the registries that hold the declarations."""
