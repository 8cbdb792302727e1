package model

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	_ "image/jpeg" // pictures come as JPEG
	_ "image/png"  // or PNG
	"math"
	"slices"
	"strings"

	pigo "github.com/esimov/pigo/core"
)

// The cascade is data of the pigo module, which does not embed it; its licence stands beside it.
//
//go:embed cascade/facefinder
var cascade []byte

const (
	pixelsMax    = 4 << 20 // a small file can unpack to a huge picture: refuse before decoding
	faceSizeMin  = 24      // px; the cascade's patches carry no more detail than this
	scoreDefault = 5.0     // below it, most detections are texture
	overlapMax   = 0.2     // intersection over union above which two detections are one face
	shiftFactor  = 0.1     // step of the window, as a share of its size
	scaleFactor  = 1.1     // growth of the window from pass to pass
)

// Faces finds upright frontal faces with a cascade of pixel comparisons
// (Markuš et al., "Object Detection with Pixel Intensity Comparisons Organized in Decision Trees", 2013).
type Faces struct{ classifier *pigo.Pigo }

// NewFaces unpacks the cascade, which takes a few milliseconds.
func NewFaces() (*Faces, error) {
	classifier, err := pigo.NewPigo().Unpack(cascade)
	if err != nil {
		return nil, fmt.Errorf("unpack cascade: %w", err)
	}
	return &Faces{classifier: classifier}, nil
}

// Name is "faces".
func (f *Faces) Name() string { return "faces" }

// FacesInput is the payload of a faces call.
type FacesInput struct {
	Image    string   `json:"image"`               // base64 of a JPEG or PNG, with or without a data: prefix
	MinSize  int      `json:"min_size,omitempty"`  // px; smallest face to look for, by default an eighth of the picture
	MinScore *float64 `json:"min_score,omitempty"` // by default 5
}

// FacesResult lists the faces of a picture, best first.
type FacesResult struct {
	Width  int    `json:"width"`
	Height int    `json:"height"`
	Count  int    `json:"count"`
	Faces  []Face `json:"faces"`
}

// Face is a square around a face, in pixels from the top left corner.
type Face struct {
	X     int     `json:"x"`
	Y     int     `json:"y"`
	Size  int     `json:"size"`
	Score float64 `json:"score"`
}

// Prepare checks the fields and the picture's header; the pixels are decoded in the slot.
func (f *Faces) Prepare(payload json.RawMessage) (Work, error) {
	var in FacesInput
	if err := Decode(payload, &in); err != nil {
		return nil, err
	}
	raw, err := in.picture()
	if err != nil {
		return nil, err
	}
	if in.MinSize != 0 && in.MinSize < faceSizeMin {
		return nil, &InputError{Field: "min_size", Reason: fmt.Sprintf("must be at least %d pixels", faceSizeMin)}
	}
	score := scoreDefault
	if in.MinScore != nil {
		score = *in.MinScore
	}
	return func(ctx context.Context) (any, error) { return f.find(ctx, raw, in.MinSize, score) }, nil
}

func (in *FacesInput) picture() ([]byte, error) {
	text := in.Image
	if text == "" {
		return nil, &InputError{Field: "image", Reason: "is required: base64 of a JPEG or PNG"}
	}
	if strings.HasPrefix(text, "data:") {
		_, text, _ = strings.Cut(text, ";base64,")
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(raw) == 0 {
		return nil, &InputError{Field: "image", Reason: "is not standard base64"}
	}
	header, _, err := image.DecodeConfig(bytes.NewReader(raw))
	if err != nil {
		return nil, &InputError{Field: "image", Reason: "is neither a JPEG nor a PNG"}
	}
	if pixels := int64(header.Width) * int64(header.Height); pixels > pixelsMax {
		return nil, &InputError{Field: "image", Reason: fmt.Sprintf("has %d pixels, at most %d are allowed", pixels,
			pixelsMax)}
	}
	return raw, nil
}

func (f *Faces) find(ctx context.Context, raw []byte, minSize int, minScore float64) (*FacesResult, error) {
	picture, _, err := image.Decode(bytes.NewReader(raw))
	if err != nil {
		return nil, &InputError{Field: "image", Reason: "cannot be decoded: " + err.Error()}
	}
	width, height := picture.Bounds().Dx(), picture.Bounds().Dy()
	params := pigo.CascadeParams{
		ShiftFactor: shiftFactor,
		ScaleFactor: scaleFactor,
		ImageParams: pigo.ImageParams{Pixels: pigo.RgbToGrayscale(picture), Rows: height, Cols: width, Dim: width},
	}
	if minSize == 0 {
		minSize = max(faceSizeMin, min(width, height)/8)
	}
	var found []pigo.Detection
	for size := minSize; size <= min(width, height); size = grow(size) {
		// One pass cannot be interrupted, so the passes are run one by one.
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		params.MinSize, params.MaxSize = size, size
		found = append(found, f.classifier.RunCascade(params, 0)...)
	}
	faces := strongest(f.classifier.ClusterDetections(found, overlapMax), minScore)
	return &FacesResult{Width: width, Height: height, Count: len(faces), Faces: faces}, nil
}

func grow(size int) int { return size + max(2, int(float64(size)*(scaleFactor-1))) }

// strongest keeps the detections above minScore that no better one overlaps, best first:
// clustering alone may leave two clusters on one face.
func strongest(detections []pigo.Detection, minScore float64) []Face {
	slices.SortStableFunc(detections, func(a, b pigo.Detection) int { return cmp.Compare(b.Q, a.Q) })
	faces := []Face{}
	for _, d := range detections {
		face := Face{
			X: d.Col - d.Scale/2, Y: d.Row - d.Scale/2, Size: d.Scale,
			Score: math.Round(float64(d.Q)*100) / 100,
		}
		same := func(better Face) bool { return face.overlap(better) > overlapMax }
		if float64(d.Q) >= minScore && !slices.ContainsFunc(faces, same) {
			faces = append(faces, face)
		}
	}
	return faces
}

// overlap is the area two faces share, as a share of the area they cover together.
func (f Face) overlap(other Face) float64 {
	width := min(f.X+f.Size, other.X+other.Size) - max(f.X, other.X)
	height := min(f.Y+f.Size, other.Y+other.Size) - max(f.Y, other.Y)
	if width <= 0 || height <= 0 {
		return 0
	}
	return float64(width*height) / float64(f.Size*f.Size+other.Size*other.Size-width*height)
}
