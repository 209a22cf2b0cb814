"""``manage.py worqr``, which Django finds here."""
