"""The page in the browser: files that sailord serves as they are, without a build step."""
