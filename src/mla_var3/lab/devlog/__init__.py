"""Devlogs: what one version was meant to do, what it did, and the verdict, with figures that point at records.

`values` turns a record into figures, `citations` compares the figures of a Markdown text with the records it cites,
`entry` knows the form of one entry, `check` and `new` are the two verbs.
"""

from __future__ import annotations
