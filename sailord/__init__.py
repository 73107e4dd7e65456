"""The controller: it decides what the cluster should do next and offers the command line."""
