"""{{ cookiecutter.package_name }}: see README.md for the first ten minutes and `__main__.py` for the one door."""
