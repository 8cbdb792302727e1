package model

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/pemistahl/lingua-go"
)

const (
	textRunesMax  = 20_000
	candidatesMax = 3
	undetermined  = "und" // BCP 47
)

// Language tells in which of a dozen languages a text is written.
type Language struct{ detector lingua.LanguageDetector }

// spoken is kept to a dozen so that start-up stays under a second and memory under 100 MB;
// for the same reason only trigrams are used, which suffices from about one sentence on.
func spoken() []lingua.Language {
	return []lingua.Language{
		lingua.Arabic, lingua.Dutch, lingua.English, lingua.French, lingua.German, lingua.Italian,
		lingua.Japanese, lingua.Polish, lingua.Portuguese, lingua.Russian, lingua.Spanish, lingua.Turkish,
	}
}

// NewLanguage unpacks the language models, which takes most of a second.
func NewLanguage() *Language {
	return &Language{detector: lingua.NewLanguageDetectorBuilder().
		FromLanguages(spoken()...).
		WithPreloadedLanguageModels().
		WithLowAccuracyMode().
		Build()}
}

// Name is "language".
func (l *Language) Name() string { return "language" }

// LanguageInput is the payload of a language call.
type LanguageInput struct {
	Text string `json:"text"` // at most 20,000 characters
}

// LanguageResult is the likeliest language and the runners-up.
type LanguageResult struct {
	Language   string      `json:"language"` // ISO 639-1, or "und" where the text has nothing to go by
	Name       string      `json:"name"`
	Confidence float64     `json:"confidence"` // 0..1 among the known languages
	Candidates []Candidate `json:"candidates"`
}

// Candidate is one language with its confidence, 0..1.
type Candidate struct {
	Language   string  `json:"language"`
	Confidence float64 `json:"confidence"`
}

// Prepare checks that there is a text of bearable length.
func (l *Language) Prepare(payload json.RawMessage) (Work, error) {
	var in LanguageInput
	if err := Decode(payload, &in); err != nil {
		return nil, err
	}
	if strings.TrimSpace(in.Text) == "" {
		return nil, &InputError{Field: "text", Reason: "is required"}
	}
	if runes := utf8.RuneCountInString(in.Text); runes > textRunesMax {
		return nil, &InputError{Field: "text", Reason: fmt.Sprintf("has %d characters, at most %d are allowed", runes,
			textRunesMax)}
	}
	return func(ctx context.Context) (any, error) {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return l.detect(in.Text), nil
	}, nil
}

func (l *Language) detect(text string) *LanguageResult {
	values := slices.DeleteFunc(l.detector.ComputeLanguageConfidenceValues(text),
		func(v lingua.ConfidenceValue) bool { return v.Value() == 0 })
	result := &LanguageResult{Language: undetermined, Name: "Undetermined", Candidates: []Candidate{}}
	for _, v := range values[:min(len(values), candidatesMax)] {
		result.Candidates = append(result.Candidates,
			Candidate{Language: code(v.Language()), Confidence: round(v.Value())})
	}
	if len(values) > 0 {
		result.Language, result.Name, result.Confidence = code(values[0].Language()), values[0].Language().String(),
			round(values[0].Value())
	}
	return result
}

func code(language lingua.Language) string { return strings.ToLower(language.IsoCode639_1().String()) }

func round(confidence float64) float64 { return math.Round(confidence*10_000) / 10_000 }
