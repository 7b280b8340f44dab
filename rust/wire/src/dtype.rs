//! Element types, under the names safetensors gives them.
//!
//! This is the closed list of types that an entry of a container can have. A tensor of another type travels as bytes.

/// The element type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant is the field's own name for the type")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    F4,
    F6E2M3,
    F6E3M2,
}

impl Dtype {
    /// Every element type, in the order of the enum.
    pub const ALL: [Self; 22] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
        Self::F8E8M0,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::F4,
        Self::F6E2M3,
        Self::F6E3M2,
    ];

    /// The name of the type in a safetensors header.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::F8E8M0 => "F8_E8M0",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::F4 => "F4",
            Self::F6E2M3 => "F6_E2M3",
            Self::F6E3M2 => "F6_E3M2",
        }
    }

    /// The type with this safetensors name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "BOOL" => Self::Bool,
            "U8" => Self::U8,
            "I8" => Self::I8,
            "F8_E5M2" => Self::F8E5M2,
            "F8_E4M3" => Self::F8E4M3,
            "I16" => Self::I16,
            "U16" => Self::U16,
            "F16" => Self::F16,
            "BF16" => Self::BF16,
            "I32" => Self::I32,
            "U32" => Self::U32,
            "F32" => Self::F32,
            "C64" => Self::C64,
            "F64" => Self::F64,
            "I64" => Self::I64,
            "U64" => Self::U64,
            "F8_E8M0" => Self::F8E8M0,
            "F8_E4M3FNUZ" => Self::F8E4M3Fnuz,
            "F8_E5M2FNUZ" => Self::F8E5M2Fnuz,
            "F4" => Self::F4,
            "F6_E2M3" => Self::F6E2M3,
            "F6_E3M2" => Self::F6E3M2,
            _ => return None,
        })
    }

    /// Bits per element. Elements of the 4 and 6 bit types are packed, so an entry of them has to end on a whole byte.
    #[must_use]
    pub fn bits(self) -> u64 {
        match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
        }
    }

    /// Whether a tensor of this type can require a gradient: its elements are floating-point or complex numbers.
    #[must_use]
    pub fn has_gradient(self) -> bool {
        !matches!(
            self,
            Self::Bool | Self::U8 | Self::I8 | Self::I16 | Self::U16 | Self::I32 | Self::U32 | Self::I64 | Self::U64
        )
    }

    /// The alignment of an element's address in bytes: a power of two, at most 8. A complex number is as wide as two
    /// floats and aligned like one, but counts as 8 here, so that it may be read as one word. Payloads are laid out by
    /// descending alignment.
    #[must_use]
    pub fn alignment(self) -> u64 {
        (self.bits() / 8).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_types() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        for name in ["", "f32", "F32 ", "C128", "F8", "__metadata__"] {
            assert_eq!(Dtype::from_name(name), None, "{name}");
        }
    }

    #[test]
    fn alignments_are_powers_of_two_up_to_eight() {
        for dtype in Dtype::ALL {
            assert!([1, 2, 4, 8].contains(&dtype.alignment()), "{dtype:?}");
        }
        assert_eq!(Dtype::BF16.alignment(), 2);
        assert_eq!(Dtype::C64.alignment(), 8);
        assert_eq!(Dtype::F4.alignment(), 1);
    }
}
