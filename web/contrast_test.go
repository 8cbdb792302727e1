package web

import (
	"math"
	"regexp"
	"strconv"
	"testing"
)

var colourPair = regexp.MustCompile(`--([a-z0-9-]+):light-dark\(#([0-9a-f]{3,6}),#([0-9a-f]{3,6})\)`)

// luminance is the relative luminance of a colour (WCAG 2.2).
func luminance(t *testing.T, colour string) float64 {
	t.Helper()
	if len(colour) == 3 {
		colour = string([]byte{colour[0], colour[0], colour[1], colour[1], colour[2], colour[2]})
	}
	sum := 0.0
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		n, err := strconv.ParseUint(colour[2*i:2*i+2], 16, 8)
		if err != nil {
			t.Fatalf("colour %q: %v", colour, err)
		}
		c := float64(n) / 255
		if c <= 0.04045 {
			c /= 12.92
		} else {
			c = math.Pow((c+0.055)/1.055, 2.4)
		}
		sum += weight * c
	}
	return sum
}

// Texts have the contrast that WCAG 2.2 asks for at level AA, 4.5 to 1, on each ground that they are written on, in light
// and in dark.
func TestTextsHaveTheContrastOfLevelAA(t *testing.T) {
	css, err := files.ReadFile("static/app.css")
	if err != nil {
		t.Fatal(err)
	}
	colours := map[string][]string{}
	for _, m := range colourPair.FindAllStringSubmatch(string(css), -1) {
		colours[m[1]] = m[2:]
	}
	grounds := []string{"bg", "surface", "raised"}
	for text, on := range map[string][]string{
		"ink": append(grounds, "good-bg", "warn-bg", "bad-bg"), "ink-2": grounds, "ink-3": grounds, "accent": grounds,
		"accent-ink": {"accent"}, "warn": {"surface", "bg", "warn-bg"}, "st-waiting": {"surface", "warn-bg"},
		"st-failed": {"surface", "bg", "bad-bg"}, "st-done": {"surface", "good-bg"}, "st-initial": {"surface", "raised"},
		"st-computing": {"surface", "raised"}, "st-disabled": {"surface", "raised"},
	} {
		for _, ground := range on {
			if len(colours[text]) != 2 || len(colours[ground]) != 2 {
				t.Fatalf("app.css has no colours %s and %s", text, ground)
			}
			for i, scheme := range []string{"light", "dark"} {
				a, b := luminance(t, colours[text][i]), luminance(t, colours[ground][i])
				if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < 4.5 {
					t.Errorf("%s: %s on %s has a contrast of %.2f, want 4.5", scheme, text, ground, ratio)
				}
			}
		}
	}
}
