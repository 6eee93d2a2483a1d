"""What can be done with the features of a frozen, pretrained network."""
