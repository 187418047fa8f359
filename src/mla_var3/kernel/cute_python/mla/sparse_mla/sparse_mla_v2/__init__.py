"""Version 2: missing indices copy rows that are there, tiles behind a row's last token go to nobody, strides."""
