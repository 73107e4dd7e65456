"""What several commands share: groups, options, input files, requests to sailord."""
