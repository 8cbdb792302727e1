package sample_test

import (
	"bytes"
	"image"
	"testing"

	"github.com/penstock/penstock/examples/worker/sample"
)

func TestPicturesAreSmallAndTheSameEachTime(t *testing.T) {
	const jpegBytesMax = 40 << 10
	first, err := sample.Pictures(15)
	if err != nil {
		t.Fatal(err)
	}
	again, err := sample.Pictures(15)
	if err != nil {
		t.Fatal(err)
	}
	distinct := map[string]bool{}
	for i, p := range first {
		if !bytes.Equal(p.JPEG, again[i].JPEG) || p.Faces != again[i].Faces {
			t.Errorf("picture %d differs from one time to the next", i)
		}
		if len(p.JPEG) > jpegBytesMax {
			t.Errorf("picture %d has %d bytes", i, len(p.JPEG))
		}
		if _, format, err := image.Decode(bytes.NewReader(p.JPEG)); err != nil || format != "jpeg" {
			t.Errorf("picture %d is a %s: %v", i, format, err)
		}
		distinct[string(p.JPEG)] = true
	}
	if len(distinct) != len(first) {
		t.Errorf("only %d of %d pictures are different", len(distinct), len(first))
	}
}

func TestTextsCoverTwelveLanguages(t *testing.T) {
	languages := map[string]int{}
	for _, text := range sample.Texts() {
		languages[text.Language]++
	}
	if len(languages) != 12 {
		t.Errorf("languages %v, want twelve", languages)
	}
}
