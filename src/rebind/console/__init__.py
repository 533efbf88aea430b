"""What commands share to talk to people in a terminal."""
