package workertest

import (
	"bytes"
	"encoding/base64"
	"image"
	"image/color"
	"image/png"
	"testing"
	"time"
)

// glyphs of a 5 by 7 raster, a row a string.
var glyphs = map[rune][7]string{
	'E': {"#####", "#....", "#....", "####.", "#....", "#....", "#####"},
	'F': {"#####", "#....", "#....", "####.", "#....", "#....", "#...."},
	'H': {"#...#", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"},
	'L': {"#....", "#....", "#....", "#....", "#....", "#....", "#####"},
	'O': {".###.", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."},
	'T': {"#####", "..#..", "..#..", "..#..", "..#..", "..#..", "..#.."},
	'I': {"#####", "..#..", "..#..", "..#..", "..#..", "..#..", "#####"},
}

// Picture draws the text, in black on white, as a data URL.
func Picture(t *testing.T, text string) string {
	t.Helper()
	const dot = 8
	img := image.NewGray(image.Rect(0, 0, dot*(8*len(text)+8), dot*15))
	for i := range img.Pix {
		img.Pix[i] = 255
	}
	for i, letter := range text {
		for y, row := range glyphs[letter] {
			for x, c := range row {
				if c != '#' {
					continue
				}
				for p := range dot * dot {
					img.SetGray(dot*(4+7*i+x)+p%dot, dot*(4+y)+p/dot, color.Gray{})
				}
			}
		}
	}
	var file bytes.Buffer
	if err := png.Encode(&file, img); err != nil {
		t.Fatal(err)
	}
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString(file.Bytes())
}

// WaitFor polls a condition that another goroutine brings about.
func WaitFor(t *testing.T, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("condition did not come about in a minute")
		}
	}
}
