"""The search under the published closed formula."""
