"""Parts of the versions in which two consumer warpgroups own half of the latent output each."""
