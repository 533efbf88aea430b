"""What the server says about itself: logs; later metrics and traces."""
