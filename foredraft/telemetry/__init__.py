"""What a service tells about itself: logs and metrics. Collects nothing about models or requests by itself."""
