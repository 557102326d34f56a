"""Predicts the steps of many ranks on machines that one has not got."""
