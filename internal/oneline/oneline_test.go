package oneline

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestALineHasNoCharacterThatSteersATerminal(t *testing.T) {
	for text, want := range map[string]string{
		"a\u009bb\u202ec\u2028d\te": "a\ufffdb\ufffdc\ufffdd e",
		"a\x00b\xffc\r\n":           "a\ufffdb\ufffdc  ",
		"two  blanks stay":          "two  blanks stay",
	} {
		if got := Of(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

func TestACutKeepsWholeCharacters(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{" status 500:\r\n\tno  room ", 50, "status 500: no room"},
		{"größer", 6, "größer"},
		{"größer", 5, "größ…"},
		{"größer", 3, "gr…"},
	} {
		if got := Short(c.text, c.most); got != c.want || !utf8.ValidString(got) {
			t.Errorf("%q to %d: got %q, want %q", c.text, c.most, got, c.want)
		}
	}
	if got := Short(strings.Repeat("é", 600), 500); utf8.RuneCountInString(got) != 500 {
		t.Errorf("%d characters, want 500", utf8.RuneCountInString(got))
	}
}
