package model_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"image"
	"image/png"
	"strings"
	"testing"

	"github.com/penstock/penstock/examples/worker/model"
	"github.com/penstock/penstock/examples/worker/sample"
)

func load(t *testing.T, name string) model.Model {
	t.Helper()
	models, err := model.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	return models[0]
}

// run takes a payload through the model to a result of type R.
func run[R any](t *testing.T, m model.Model, payload any) R {
	t.Helper()
	raw, err := json.Marshal(payload)
	if err != nil {
		t.Fatal(err)
	}
	work, err := m.Prepare(raw)
	if err != nil {
		t.Fatalf("prepare: %v", err)
	}
	got, err := work(t.Context())
	if err != nil {
		t.Fatalf("work: %v", err)
	}
	result, ok := got.(R)
	if !ok {
		t.Fatalf("result is a %T, want %T", got, result)
	}
	return result
}

func TestFacesCountsThePeopleInEachPicture(t *testing.T) {
	faces := load(t, "faces")
	pictures, err := sample.Pictures(15)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range pictures {
		got := run[*model.FacesResult](t, faces, model.FacesInput{Image: base64Of(p.JPEG)})
		if got.Count != p.Faces || len(got.Faces) != p.Faces {
			t.Errorf("picture %d: found %d faces, want %d: %+v", i, got.Count, p.Faces, got)
		}
	}
}

func TestFacesFramesTheFace(t *testing.T) {
	pictures, err := sample.Pictures(1)
	if err != nil {
		t.Fatal(err)
	}
	got := run[*model.FacesResult](t, load(t, "faces"), model.FacesInput{Image: "data:image/jpeg;base64," + base64Of(pictures[0].JPEG)})
	if len(got.Faces) != 1 {
		t.Fatalf("found %+v, want one face", got)
	}
	face := got.Faces[0]
	// The eyes of the portrait stand in its middle, at 46 % of its height.
	eyesX, eyesY := got.Width/2, got.Height*46/100
	if eyesX < face.X || eyesX > face.X+face.Size || eyesY < face.Y || eyesY > face.Y+face.Size {
		t.Errorf("face %+v does not contain the eyes at (%d, %d)", face, eyesX, eyesY)
	}
	if face.Size > got.Width || face.Score < 5 {
		t.Errorf("face %+v is no plausible face of a picture %d wide", face, got.Width)
	}
}

func TestFacesStopsWhenItsContextEnds(t *testing.T) {
	pictures, err := sample.Pictures(1)
	if err != nil {
		t.Fatal(err)
	}
	raw, _ := json.Marshal(model.FacesInput{Image: base64Of(pictures[0].JPEG)})
	work, err := load(t, "faces").Prepare(raw)
	if err != nil {
		t.Fatal(err)
	}
	gone := errors.New("caller gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	if _, err := work(ctx); !errors.Is(err, gone) {
		t.Errorf("work under an ended context: %v, want %v", err, gone)
	}
}

func TestLanguageKnowsEachSampleSentence(t *testing.T) {
	language := load(t, "language")
	for _, text := range sample.Texts() {
		got := run[*model.LanguageResult](t, language, model.LanguageInput{Text: text.Text})
		if got.Language != text.Language || got.Confidence <= 0 || len(got.Candidates) == 0 {
			t.Errorf("%q: got %+v, want %s", text.Text, got, text.Language)
		}
	}
}

func TestLanguageOfDigitsIsUndetermined(t *testing.T) {
	got := run[*model.LanguageResult](t, load(t, "language"), model.LanguageInput{Text: "12 + 30 = 42"})
	if got.Language != "und" || got.Confidence != 0 || len(got.Candidates) != 0 {
		t.Errorf("got %+v, want und", got)
	}
}

func TestEchoAnswersItsPayload(t *testing.T) {
	got := run[json.RawMessage](t, load(t, "echo"), map[string]any{"n": 7})
	if string(got) != `{"n":7}` {
		t.Errorf("echo: %s", got)
	}
}

func TestBadInputNamesItsField(t *testing.T) {
	faces, language := load(t, "faces"), load(t, "language")
	cases := []struct {
		model   model.Model
		payload string
		field   string
		reason  string
	}{
		{faces, `{}`, "image", "is required"},
		{faces, `{"image":""}`, "image", "is required"},
		{faces, `{"image":7}`, "image", "must be a string"},
		{faces, `{"image":"%%%"}`, "image", "base64"},
		{faces, `{"image":"data:image/jpeg,x"}`, "image", "base64"},
		{faces, `{"image":"aGVsbG8="}`, "image", "neither"},
		{faces, `{"image":"` + base64Of(pngOf(t, 2100, 2100)) + `"}`, "image", "pixels"},
		{faces, `{"image":"` + base64Of(pngOf(t, 40, 40)) + `","min_size":3}`, "min_size", "at least"},
		{faces, `{"imgae":"x"}`, "", "imgae"},
		{faces, `[1]`, "", "must be an object"},
		{faces, ``, "", "missing"},
		{language, `{"text":" "}`, "text", "is required"},
		{language, `{"text":["a"]}`, "text", "must be a string"},
		{language, `{"text":"` + strings.Repeat("a", 20_001) + `"}`, "text", "20001 characters"},
	}
	for _, c := range cases {
		_, err := c.model.Prepare(json.RawMessage(c.payload))
		var bad *model.InputError
		if !errors.As(err, &bad) || bad.Field != c.field || !strings.Contains(bad.Reason, c.reason) {
			t.Errorf("%s %.60s: %#v, want field %q and %q", c.model.Name(), c.payload, err, c.field, c.reason)
		}
	}
}

func TestTruncatedPictureIsAnInputError(t *testing.T) {
	whole := pngOf(t, 40, 40)
	work, err := load(t, "faces").Prepare(json.RawMessage(`{"image":"` + base64Of(whole[:len(whole)-20]) + `"}`))
	if err != nil {
		t.Fatal(err)
	}
	_, err = work(t.Context())
	var bad *model.InputError
	if !errors.As(err, &bad) || bad.Field != "image" {
		t.Errorf("truncated picture: %v, want an input error about image", err)
	}
}

func TestUnknownModelIsRefusedByName(t *testing.T) {
	if _, err := model.Load("echo", "fuax"); err == nil || !strings.Contains(err.Error(), "fuax") {
		t.Errorf("Load(fuax): %v", err)
	}
}

func pngOf(t *testing.T, width, height int) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := png.Encode(&out, image.NewGray(image.Rect(0, 0, width, height))); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func base64Of(raw []byte) string {
	text, _ := json.Marshal(raw)
	return strings.Trim(string(text), `"`)
}

func BenchmarkFaces(b *testing.B) {
	pictures, err := sample.Pictures(4)
	if err != nil {
		b.Fatal(err)
	}
	faces, err := model.NewFaces()
	if err != nil {
		b.Fatal(err)
	}
	work, err := faces.Prepare(json.RawMessage(`{"image":"` + base64Of(pictures[3].JPEG) + `"}`))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := work(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLanguage(b *testing.B) {
	text := sample.Texts()[0].Text
	for name, repeat := range map[string]int{"sentence": 1, "20000": 20_000 / len(text)} {
		b.Run(name, func(b *testing.B) {
			work, err := model.NewLanguage().Prepare(json.RawMessage(`{"text":"` + strings.Repeat(text, repeat) + `"}`))
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if _, err := work(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
