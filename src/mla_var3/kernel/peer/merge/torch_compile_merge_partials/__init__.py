"""What torch.compile makes of merging partial attention."""
