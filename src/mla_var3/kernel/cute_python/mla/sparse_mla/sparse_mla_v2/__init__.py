"""Version 2: rows that no index names are zeroed in place, tiles behind a row's last token go to nobody, strides."""
