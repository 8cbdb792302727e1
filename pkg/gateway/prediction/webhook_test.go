package prediction

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// A host may become shorter or longer in lower case, and its bytes need not be UTF-8: neither ends the program, and the
// flow of a delivery is text that the database takes.
func TestFlowOfADeliveryIsTextOfItsHost(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"https://Hooks.Example:8443/x":                   "hooks.example:8443",
		"https://%E2%84%AA.example/":                     "k.example", // the Kelvin sign, three bytes
		"https://\u212a.example/":                        "k.example",
		"https://" + strings.Repeat("a", 63) + "\u00e9/": strings.Repeat("a", 63),
		"https://%FF.example/":                           "\uFFFD.example",
		"https://" + strings.Repeat("\u0130", 40) + "/":  strings.Repeat("i", 40),
		"://": "",
	} {
		if got := hostOf(address); got != want || !utf8.ValidString(got) || len(got) > flowBytesMax {
			t.Errorf("%s: got %q, want %q", address, got, want)
		}
	}
}

func TestWebhooksHaveAHostInASCII(t *testing.T) {
	t.Parallel()
	for address, fits := range map[string]bool{
		"https://hooks.example/x":                      true,
		"http://[2001:db8::1]:8080/":                   true,
		"https://xn--bcher-kva.example/":               true,
		"https://b\u00fccher.example/":                 false,
		"https://%E2%84%AA.example/":                   false,
		"https:///x":                                   false,
		"ftp://hooks.example/":                         false,
		"https://a/" + strings.Repeat("x", webhookMax): false,
	} {
		if err := (&Predictions{}).checkWebhook(address); (err == nil) != fits {
			t.Errorf("%s: got %v", address, err)
		}
	}
}
