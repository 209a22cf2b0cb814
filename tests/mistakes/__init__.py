"""Mistakes of newcomers, one test each. A test makes the mistake and reads the message: what is wrong, where, the remedy.

The rules behind the messages have tests of their own, beside the code that raises them.
"""
