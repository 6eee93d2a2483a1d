"""What a trained model is worth: metrics, intervals, calibration, foreign images."""
