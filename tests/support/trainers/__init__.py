"""What each rank runs in the tests of the examples."""
