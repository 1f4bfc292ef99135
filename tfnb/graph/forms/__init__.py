"""A graph written down: `text` for people, JSON for programs.

`encode` writes the JSON form and `decode` reads it; `serial` puts it in files and in strings, and hashes it.
"""
