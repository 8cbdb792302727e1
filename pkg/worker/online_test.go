package worker

import (
	"errors"
	"testing"
)

// A header that HTTP does not allow is an error when the model is read, and not one of each call.
func TestHeadersThatHTTPDoesNotAllowAreRefused(t *testing.T) {
	t.Parallel()
	for _, headers := range []map[string]string{{"X A": "1"}, {"X-A": "1\n2"}, {"": "1"}} {
		h, err := ResolveHeaders(headers)
		var of *HeaderError
		if !errors.As(err, &of) || of.Header == "" {
			t.Errorf("%v became %v, error %v", headers, h, err)
		}
	}
	h, err := ResolveHeaders(map[string]string{"x-a": "1, 2"})
	if err != nil || h.Get("X-A") != "1, 2" {
		t.Errorf("got %v, %v", h, err)
	}
}
