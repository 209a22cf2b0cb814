"""Programs that make pages and pictures of the documentation. They are not part of the package that users install.

Run them in a checkout: ``python -m tools.cli_reference``, ``python -m tools.demo_svg docs/demo.svg``.
"""
