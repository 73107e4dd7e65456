"""Google's metadata server, and notices that the instance will be stopped."""
