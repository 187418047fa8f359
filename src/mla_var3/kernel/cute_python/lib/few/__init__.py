"""Few query rows: two warpgroups on one tile, and splits that are joined inside the main kernel."""
