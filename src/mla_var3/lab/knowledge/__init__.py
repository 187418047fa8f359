"""What was learned: pages of docs/knowledge, their triggers, their index, and the code blocks that are compiled.

`page` reads a page, `triggers` says when an entry applies, `check` enforces the form, `index` writes what a diagnosis
reads, `find` matches facts against it, `blocks` and `compile_blocks` compile the code that pages show.
"""
