package meter

import "testing"

func TestQuantileIsTheNearestRank(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, test := range []struct {
		values  []float64
		q, want float64
	}{{nil, 0.5, 0}, {[]float64{7}, 0.99, 7}, {[]float64{1, 2, 3}, 0.5, 2}, {hundred, 0.99, 99}, {hundred, 1, 100}} {
		if got := Quantile(test.values, test.q); got != test.want {
			t.Errorf("quantile %v of %d values is %v, want %v", test.q, len(test.values), got, test.want)
		}
	}
}
