"""The work folders of scripts on a node: fetched, checked, unpacked, set up."""
